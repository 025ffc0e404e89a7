"""The declaration of a log: tables, features, labels."""
