package attest

// ParsePolicyWithVendors is [ParsePolicy] with other vendors of processors than AMD and Intel.
var ParsePolicyWithVendors = parsePolicy
