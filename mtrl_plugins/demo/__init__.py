"""Demos: generated tasks, tiny models that are built and warm-started for them on a CPU, and the run files of both.

`demos.py` has the demos by name (`facts/`, `sight/`, `shelves/`), `warm_start.py` and `model_cache.py` build their
models, and `jobs/` has run files, some of which train real models. `lake/` has the tasks of one of them.
"""
