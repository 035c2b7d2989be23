"""The engine: from ids and shapes at the bottom to meshes at the top (see docs/design.md)."""
