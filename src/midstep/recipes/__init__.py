"""The recipes that come with the package: complete trainings that need no download."""
