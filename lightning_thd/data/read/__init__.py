"""Files and records -> token ids."""
