"""Jobs on clusters: an sbatch script and Kubernetes manifests.

`cluster_plan.py` lays a job out on nodes; `slurm.py` and `kubernetes.py` write it as files for `mtrl-train render`.
"""
