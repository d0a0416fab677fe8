"""Jobs on clusters: an sbatch script, Kubernetes manifests, and `--ray` on a cluster of Ray.

`cluster_plan.py` lays a job out on nodes; `slurm.py` and `kubernetes.py` write it as files for
`mtrl-train render`, and `ray_launcher.py` runs it on Ray.
"""
