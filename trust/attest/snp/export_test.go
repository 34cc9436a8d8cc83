package snp

// Genuine is [Verify] without the binding: some captured reports are bound to nothing.
var Genuine = genuine
