"""What ranks say together: reduce operations, collectives, point-to-point, pending work."""
