"""Inner loops of the search: a step of the descent, and the moves of polishing, in few large operations."""
