"""From an answer's signals to a confidence, and from a confidence to a threshold with a guarantee.

Pure: numpy and msgspec. Running models, reading files and plotting are not done here.
"""
