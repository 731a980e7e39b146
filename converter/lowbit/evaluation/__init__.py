"""How well does a model do its task, and how much of that is chance?"""
