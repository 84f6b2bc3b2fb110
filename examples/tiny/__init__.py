"""Parts of examples/train_tiny.py: corpus, scans, the three models, checkpoint directories, training, model card."""
