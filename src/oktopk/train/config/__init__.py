"""What a run is configured with, where each value comes from, and the plan that follows from it."""
