package hcl

// Parse reads a JSON text that no hardware report is bound to.
var Parse = parse
