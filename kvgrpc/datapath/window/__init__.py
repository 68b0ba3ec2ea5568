"""Data path `window`: a source copies what it is asked for into memory that one peer alone may map."""
