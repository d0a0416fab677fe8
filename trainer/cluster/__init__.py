"""Renders the files that run a job on a cluster: an sbatch script, Kubernetes manifests, or a KubeRay manifest."""
