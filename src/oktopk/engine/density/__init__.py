"""density="auto": the largest density whose exposed communication stays within a budget."""
