"""What everything runs on: settings, catalog, tracking, registry, training substrate and inference."""
