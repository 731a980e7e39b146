"""Does a converted model compute what its original says?"""
