"""The vocabulary that models are written in (base.py) and its interpreters (torch_ops.py runs it).

Importing this package imports no torch.
"""
