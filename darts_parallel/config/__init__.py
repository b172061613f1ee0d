"""What a user may write: schema, composition, and one sentence for what cannot be."""
