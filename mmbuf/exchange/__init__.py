"""Stores as other tools' files, and their files as stores.

``parquet`` and ``hf`` (Hugging Face datasets) write the tables of `analysis`; ``hdf5`` and
``minari`` make a store of episodes.
"""
