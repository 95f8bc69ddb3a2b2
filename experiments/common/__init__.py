"""What all measuring has in common: fields of files, machines, intervals, tables. Imports no other room."""
