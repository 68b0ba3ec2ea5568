"""`kvgrpc top`: several leads at once, on a screen that is kept up to date."""
