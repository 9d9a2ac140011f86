"""The fixed shapes (buckets) that are captured, and batches padded to them."""
