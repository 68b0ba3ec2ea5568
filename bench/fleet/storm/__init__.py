"""A storm of requests over real leads that are killed and added at random, each compared byte by byte."""
