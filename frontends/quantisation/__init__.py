"""Written models with other weight dtypes: the dtype of each tensor, importances, and the conversion."""
