"""An attack on the command: random problems against another enumeration, and bad input of every kind."""
