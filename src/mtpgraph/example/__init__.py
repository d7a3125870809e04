"""A small trained byte-level hybrid decoder, written with the public ops as a user would."""
