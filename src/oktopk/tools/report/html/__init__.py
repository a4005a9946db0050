"""The HTML page of a report: charts, tables, style."""
