"""Parts of examples/train_tiny.py: corpus, scans, the two models, checkpoint directories, training, model card."""
