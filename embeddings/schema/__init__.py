"""The declaration of a log: tables, features, labels. Free of torch; imports nothing of ours."""
