package atls

import "time"

// Patience is how long a machine that builds at the same time may take.
const Patience = 5 * time.Minute

// patient are timeouts that no test reaches: what ends earlier was ended by something else.
var patient = timeouts{handshake: 2 * Patience, exchange: 2 * Patience}

// Patient makes a server's handshakes and exchanges end by nothing but their peers and Close.
func (c *ServerConfig) Patient() { c.timeouts = patient }

// Patient is the same for a client.
func (c *ClientConfig) Patient() { c.timeouts = patient }
