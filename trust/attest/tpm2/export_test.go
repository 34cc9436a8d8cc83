package tpm2

// Waiting tells how many statements wait for the next quote.
func Waiting(a *Attester) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting == nil {
		return 0
	}
	return len(a.waiting.leaves)
}

// ParseSignature is verifySignature, for fuzzing.
var ParseSignature = verifySignature
