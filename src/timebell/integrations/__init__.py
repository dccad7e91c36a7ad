"""Framework integrations, one module each, imported only by applications that use the framework."""
