"""A model to the formats of other libraries."""
