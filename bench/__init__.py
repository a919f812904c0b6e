"""The benchmark: `python -m bench`; see docs/roofline.md."""
