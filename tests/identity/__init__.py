"""Tests of identities, roles, tenants and what an operator sees of them."""
