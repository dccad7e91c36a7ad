"""HTTP. So far: whether this process is well."""
