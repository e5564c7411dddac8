"""Other people's formats: `pt` and `pkl` files, as RLinf writes and reads them."""
