"""Devices, meshes, hosts and partition rules. Independent of models."""
