"""Lengths found in a first pass over a stream -> later epochs planned exactly and read by record number."""
