"""Recipes: a checkpoint's config → a flow. One file for each family."""
