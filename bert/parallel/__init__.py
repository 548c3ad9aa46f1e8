"""Devices, meshes, hosts and partition rules. Knows no model."""
