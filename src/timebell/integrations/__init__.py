"""Ways into frameworks, one module each: nothing here is imported unless its framework is there."""
