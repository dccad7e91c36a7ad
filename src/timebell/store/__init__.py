"""The database: tables, operations in transactions, and the SQL of each dialect."""
