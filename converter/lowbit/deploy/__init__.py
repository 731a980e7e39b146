"""Models made ready for where they run: compiled for a device, packed for a phone."""
