"""Published or own measurements of training runs: reading, prediction, error, calibration."""
