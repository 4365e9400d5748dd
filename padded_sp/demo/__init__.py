"""The demo: a language model trained without padding, with padded_sp, and as others do."""
