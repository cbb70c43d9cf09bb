"""Alembic migrations of the catalog, applied by ``Catalog.open``."""
