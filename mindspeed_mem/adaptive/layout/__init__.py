"""The search of a whole layout: how a model is split over devices, with the memory plan of each split."""
