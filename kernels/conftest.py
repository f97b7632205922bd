"""What pytest must not import when it looks for the docstrings' examples."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*/triton_gpu.py"]
