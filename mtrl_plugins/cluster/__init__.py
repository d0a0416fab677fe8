"""Jobs on clusters: an sbatch script.

`cluster_plan.py` lays a job out on nodes; `slurm.py` writes it as files for `mtrl-train render`.
"""
