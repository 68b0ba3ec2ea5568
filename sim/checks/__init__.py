"""Checks of what must hold in every world, from outside the code under test."""
