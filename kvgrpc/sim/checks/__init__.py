"""Checks: what must hold in every world, known from outside the code under test."""
